"""What several families are made of; generic code goes through `models.spec` and imports nothing from here."""

"""Building blocks shared by several families. Generic code goes through `models.spec` and imports nothing from here."""

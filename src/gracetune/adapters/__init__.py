"""LoRA, DoRA, LyCORIS and full fine-tuning; file formats in and out; verification."""

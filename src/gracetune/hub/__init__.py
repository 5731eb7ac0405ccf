"""The Hugging Face hub: access settings, error messages and uploads."""

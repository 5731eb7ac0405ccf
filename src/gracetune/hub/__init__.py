"""The Hugging Face hub: whether it may be asked, what its refusals mean, and uploads to it."""

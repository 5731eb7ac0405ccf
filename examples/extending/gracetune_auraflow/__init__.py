"""AuraFlow: an image transformer with one text encoder."""

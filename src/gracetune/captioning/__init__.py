"""Write captions for a folder of images with a vision language model, as `gracetune data caption` does."""

"""A first config for a folder of images, clips or sounds: what it holds, what suits it, and the file that says so."""

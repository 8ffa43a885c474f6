"""Images: sources that read them by index, keyed augmentation, and the loader that deals them
out."""

"""The demo: an assistant over a folder of real documents."""

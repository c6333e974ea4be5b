"""Code that several lint rules share."""

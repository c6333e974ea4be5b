"""Code that several file formats share."""

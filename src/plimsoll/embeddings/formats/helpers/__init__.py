"""Code that several formats of word vectors share."""

"""Code that several causes share."""

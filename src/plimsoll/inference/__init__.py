"""A model applied to every row of a file inside a budget."""

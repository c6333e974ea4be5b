"""What a training needs of memory, before it runs and while it runs."""

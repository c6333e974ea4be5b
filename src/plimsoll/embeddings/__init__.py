"""Pretrained vectors and tables of embeddings, as little of them in memory as a training needs."""

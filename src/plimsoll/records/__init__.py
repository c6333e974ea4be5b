"""The nouns: frozen, torch-free values, each a JSON file with a kind and a schema version; one module per stage."""

"""The models that a job can name: Hugging Face architectures and checkpoints, recurrent models, and user functions."""

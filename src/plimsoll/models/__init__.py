"""The models a job can name: Hugging Face configurations and checkpoints, recurrent nets, and the user's own."""

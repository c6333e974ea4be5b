"""Knowledge distillation: the loss of a student, computed in chunks of positions, and the teacher model."""

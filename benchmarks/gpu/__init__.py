"""Trainings on a GPU that Plimsoll predicts: recorded there, compared on any machine."""

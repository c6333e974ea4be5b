"""What a GPU does with the trainings that Plimsoll predicts: recorded there, compared anywhere."""

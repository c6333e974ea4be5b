"""The fastest mix of techniques that stays under a budget."""

"""One file for each figure or table that is reproduced, and the demo."""

"""Other stores, one small adapter each. What is not installed is left out of the comparison, and said."""

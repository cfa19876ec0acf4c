"""The page "Where systems disagree", made of what golden files record and of our mapping of each convention."""

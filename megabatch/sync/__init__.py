"""How gradients are summed over workers: buckets that leave under backward, plans, the tree."""

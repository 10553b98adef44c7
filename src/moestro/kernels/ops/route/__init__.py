"""Expert choice: logits [T, E] -> ids [T, K] and mixing weights [T, K]."""

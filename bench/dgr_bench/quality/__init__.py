"""What numerics, types and wires cost in what a trained model says: perplexity, agreement, and recall over long contexts."""

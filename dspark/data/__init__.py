"""From conversations to token rows, captured states, and the order in which trainers see them."""

"""The drafter: architecture, heads and checkpoint layout."""

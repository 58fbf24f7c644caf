"""Drafts and their verification. A draft can save time; it cannot change a token."""

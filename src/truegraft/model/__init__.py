"""The base model's room: what a directory holds, its weights, and the decoder they run in.

Knows nothing about adapters, requests or scheduling.
"""

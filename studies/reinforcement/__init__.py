"""Collapses of reinforcement learning: are they named, and sound runs left alone?"""

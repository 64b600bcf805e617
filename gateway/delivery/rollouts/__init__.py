"""Rollouts of models as the gateway performs them: what was ordered, what is remembered, what is published."""

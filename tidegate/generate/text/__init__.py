"""The text side of a generating model: tokens to text and back, chat templates and stop strings.

Whoever speaks to callers in text needs it: a gateway's fronts, and an edge's own ports. Targets know tokens only. It
needs the tokenizers library, and Jinja for models that chat: `text_models.py` and what renders templates are imported
where both are installed, and the others know the interfaces of `text_side.py`.
"""

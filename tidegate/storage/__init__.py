"""Storage on the local disk: files that are replaced atomically, SQLite databases, and the audit log of commands.

Every process and command imports it. What is stored, and in which schema, belongs to the room that stores it.
"""

"""The operators' web page: its memory (`history`), contents (`snapshot`, `verdict`, `progress`) and server (`page`).

The admin port imports the page's routes and the history, which observes requests like the other observers of the stack.
The console changes nothing in a gateway; commands that do are routes of their rooms.
"""

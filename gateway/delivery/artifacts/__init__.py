"""Model files for devices, stored by digest (`store`), served to devices (`server`), uploaded by operators (`upload`).

Others import the store, the server and the upload routes. Which device shall run which file is decided in
`gateway/delivery/rollouts`, not here.
"""

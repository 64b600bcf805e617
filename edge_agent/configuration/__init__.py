"""How settings of a running agent are changed from outside: by its own file, and by its fleet's signed documents.

    boot.py            the configuration with which the agent starts, and whether one on trial still may be used
    service.py         merges, tries, keeps or takes back, and reports; one task
    effective.py       an agent's configuration with settings over it
    device_file.py     the device's own file (`device_file`), such as a ConfigMap's
    record_file.py     what must outlive the agent, on the disk before it is acted upon
    running_parts.py   puts settings that apply at once into the parts of the running agent
    families.py        the same as metrics

Which keys there are is `tidegate/rollout/device_settings.py`; what is decided without IO is in `edge_agent/core`
(`configuration_merge.py`, `configuration_trial.py`). Whose documents count is decided in `edge_agent/delivery`.
"""

"""The command line, python -m flexpress.

cli                    the arguments of all commands
demo, doctor           what runs without any, and what it runs with
recipes                mods by name, with numbers
cache_command          the kernel folder
"""

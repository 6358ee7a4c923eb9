"""The forms: one .py.jinja per kernel, shared macros in _*.jinja. Installed as `flexpress.templates`, read as data."""

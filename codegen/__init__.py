"""The workshop: trace -> expr -> lower -> render -> cache -> launch. Installed as `flexpress.codegen`."""

if __name__ != "flexpress.codegen":
    raise ImportError("this folder is the package flexpress.codegen; import it by that name (pip install -e . sets it up)")

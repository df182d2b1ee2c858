# Unpacks a kit of scripts/gpu_kit.py and sets this shell's environment. In the repository's root:  . scripts/gpu_setup.sh FOLDER
# Into KIT_HOME (/opt/kit), once; later shells need no archives.
export KIT_HOME=${KIT_HOME:-/opt/kit}
mkdir -p "$KIT_HOME" || return 1
for _archive in "${1:-.kit}"/kit-*.tar.xz; do
    [ -e "$_archive" ] || continue
    _sum=$(sha256sum "$_archive" | cut -d' ' -f1)
    _done=$KIT_HOME/.$(basename "$_archive")
    [ "$(cat "$_done" 2>/dev/null)" = "$_sum" ] && continue
    if ! grep -q "^$_sum " "$(dirname "$_archive")/SHA256SUMS"; then
        echo "$_archive is not the one of SHA256SUMS: copy it again" >&2
        return 1
    fi
    # Python reads xz on machines without the program.
    python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1], "r:xz").extractall(sys.argv[2], filter="tar")' "$_archive" "$KIT_HOME" || return 1
    echo "$_sum" >"$_done"
done
# SGLang finds plug-ins by the metadata of an installed package; the checkout is used as it is.
python3 - "$KIT_HOME/own" <<'PY' || return 1
import pathlib, sys, tomllib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
folder = pathlib.Path(sys.argv[1], f"{project['name'].replace('-', '_')}-{project['version']}.dist-info")
folder.mkdir(parents=True, exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
groups = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items()) for group, points in project["entry-points"].items()]
(folder / "entry_points.txt").write_text("\n".join(groups))
PY
export PYTHONPATH=$PWD:$KIT_HOME/own:$KIT_HOME
export TVM_FFI_CACHE_DIR=$KIT_HOME/jit/tvm-ffi TRITON_CACHE_DIR=$KIT_HOME/jit/triton FLASHINFER_WORKSPACE_BASE=$KIT_HOME/jit
export CUDA_MODULE_LOADING=LAZY # kernels that were emptied are never read
export HF_HUB_OFFLINE=1 SGLANG_USE_SGL_FA3_KERNEL=1 # no hub
export SGLANG_IS_FLASHINFER_AVAILABLE=${SGLANG_IS_FLASHINFER_AVAILABLE:-false} # its kernels would be compiled for minutes
if [ -e "$KIT_HOME/.kit-2.tar.xz" ]; then
    eval "$(python3 -m sgl_prefill.startup.examine)" # CUDA_HOME, ninja
fi

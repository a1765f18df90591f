# The virtual environment: .venv for the defaults, .venv-TORCH[-pyVERSION] for
# others. A stamp in it holds the hash of all that decides its content, so that
# an environment which is up to date costs nothing.

# name_variant: sets VARIANT (empty for the defaults), VENV and VPYTHON.
name_variant() {
  case $TORCH in
    2.1[1-5].*) ;;
    *) die "FARANDOLE_TORCH_VERSION=$TORCH: expected a release from 2.11.0 to 2.15.0" ;;
  esac
  PYTHON_VERSION=$("$HAVE_PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  case $PYTHON_VERSION in
    3.1[0-3]) ;;
    *) die "$HAVE_PYTHON is Python $PYTHON_VERSION: expected 3.10 to 3.13; FARANDOLE_PYTHON selects another one" ;;
  esac
  VARIANT=
  if [ -n "${FARANDOLE_PYTHON:-}" ]; then
    VARIANT=$TORCH-py$PYTHON_VERSION
  elif [ "$TORCH" != "$DEFAULT_TORCH" ]; then
    VARIANT=$TORCH
  fi
  VENV=$ROOT/.venv${VARIANT:+-$VARIANT}
  VPYTHON=$VENV/bin/python
}

environment_hash() {
  { cat "$ROOT/pyproject.toml" && echo "$TORCH $UCX_WHEEL $PYTHON_VERSION"; } | sha256sum | cut -d' ' -f1
}

# Prints the minor version of torch that there is a torchrec for, as the extra "recsys" has it.
torch_of_torchrec() {
  local version
  version=$(sed -n 's/^recsys = \["torch==\([0-9.]*\)\.\*".*/\1/p' "$ROOT/pyproject.toml")
  [ -n "$version" ] || die "pyproject.toml: the extra recsys names no version of torch"
  echo "$version"
}

has_torchrec() {
  local version
  version=$(torch_of_torchrec) || exit 1
  case $TORCH in "$version".*) ;; *) return 1 ;; esac
}

# tests/python/support/megatrons.py says for what.
install_newer_megatron() {
  local newer
  newer=$(sed -n 's/^newer-megatron = \["\(megatron-core==[0-9.]*\)"\]$/\1/p' "$ROOT/pyproject.toml")
  [ -n "$newer" ] || die "pyproject.toml: the group newer-megatron names no version"
  if [ "$PYTHON_VERSION" = 3.10 ]; then return; fi
  rm -rf "$VENV/${newer/==/-}"
  "$VPYTHON" -m pip install --disable-pip-version-check --quiet --no-deps --ignore-requires-python \
    --target "$VENV/${newer/==/-}" "$newer"
}

create_environment() {
  if [ "$("$VPYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" != "$PYTHON_VERSION" ]; then
    "$HAVE_PYTHON" -m venv --clear "$VENV"
  fi
  "$VPYTHON" -m pip install --disable-pip-version-check --quiet "$(sed -n 's/.*"\(uv==[^"]*\)".*/\1/p' "$ROOT/pyproject.toml")"
  (cd "$ROOT" && "$VENV/bin/uv" pip install --compile-bytecode --python "$VPYTHON" --group dev "torch==$TORCH" "$UCX_WHEEL")
  if has_torchrec; then
    # Of its requirements, the group has what a machine without a GPU needs.
    (cd "$ROOT" && "$VENV/bin/uv" pip install --compile-bytecode --python "$VPYTHON" --no-deps --group recsys)
  fi
  install_newer_megatron
  environment_hash >"$VENV/.farandole-stamp"
}

ensure_python() {
  name_variant
  if [ "$(cat "$VENV/.farandole-stamp" 2>/dev/null)" != "$(environment_hash)" ]; then
    step "environment ${VENV#"$ROOT"/}: Python $PYTHON_VERSION, torch $TORCH" "python${VARIANT:+-$VARIANT}.log" create_environment
  fi
}

# The build, build/PRESET[-VARIANT], through the environment's own cmake and ninja.

# As many jobs as cores, but 2 GiB of memory for each: torch's headers are large.
build_jobs() {
  local cores memory
  cores=$(nproc)
  memory=$(awk '/MemAvailable/ { print int($2 / 2097152) }' /proc/meminfo)
  [ "$memory" -ge 1 ] || memory=1
  echo "${FARANDOLE_JOBS:-$((cores < memory ? cores : memory))}"
}

# ensure_build PRESET TARGET...: sets BUILD. Configures when the environment
# has changed since the last time; ninja sees all other changes itself.
ensure_build() {
  local preset=$1 name
  shift
  name=$preset${VARIANT:+-$VARIANT}
  BUILD=$ROOT/build/$name
  local stamp
  stamp="$VENV $(cat "$VENV/.farandole-stamp")"
  if [ ! -f "$BUILD/build.ninja" ] || [ "$(cat "$BUILD/.farandole-stamp" 2>/dev/null)" != "$stamp" ]; then
    step "configure build/$name" "configure-$name.log" configure "$preset"
    printf '%s\n' "$stamp" >"$BUILD/.farandole-stamp"
  fi
  step "build build/$name" "build-$name.log" \
    "$VENV/bin/cmake" --build "$BUILD" --parallel "$(build_jobs)" --target "$@"
}

configure() {
  (cd "$ROOT" && PATH=$VENV/bin:$PATH "$VENV/bin/cmake" --preset "$1" --fresh -B "$BUILD" \
    -DPython3_EXECUTABLE="$VPYTHON" -DCMAKE_MAKE_PROGRAM="$VENV/bin/ninja")
}

# Makes the build importable in the environment, entry points included.
link_package() { "$VPYTHON" "$ROOT/.ci/link_package.py" "$BUILD/python"; }

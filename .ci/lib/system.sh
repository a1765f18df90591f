# The system packages of the build. ensure_system [COMMAND...] installs the missing
# ones, and those of the named commands, as root or through sudo without a
# password; else it prints what to run and fails.

HAVE_PYTHON=${FARANDOLE_PYTHON:-python3}

has_header() { printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$1" | g++ -std=c++20 -E -x c++ - >/dev/null 2>&1; }

has_python_header() {
  local include
  include=$("$HAVE_PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["include"])') && [ -f "$include/Python.h" ]
}

# The packages that bring venv and headers for the interpreter in use.
python_package() {
  local path
  path=$(command -v "$HAVE_PYTHON") && path=$(readlink -f "$path")
  case $path in
    /usr/bin/python3.*) echo "$(basename "$path")-$1" ;;
    *) echo "python3-$1" ;;
  esac
}

# Prints the names of the missing packages; a command in "$@" is in the package of its name.
missing_packages() {
  local name
  for name in "$@"; do command -v "$name" >/dev/null || echo "$name"; done
  command -v g++ >/dev/null || echo g++
  command -v git >/dev/null || echo git
  command -v ccache >/dev/null || echo ccache
  if command -v "$HAVE_PYTHON" >/dev/null; then
    "$HAVE_PYTHON" -c 'import venv, ensurepip' 2>/dev/null || python_package venv
    has_python_header || python_package dev
  else
    echo python3 python3-venv python3-dev
  fi
  if ! command -v g++ >/dev/null || ! has_header boost/asio.hpp; then echo libboost-dev; fi
  if ! command -v g++ >/dev/null || ! has_header gtest/gtest.h; then echo libgtest-dev; fi
}

install_packages() {
  "$@" apt-get update && "$@" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing
}

ensure_system() {
  local missing
  missing=$(missing_packages "$@" | xargs)
  if [ -n "$missing" ]; then
    if ! command -v apt-get >/dev/null; then
      [ "$missing" = ccache ] && return
      die "missing: $missing (names of Debian packages). This system has no apt-get: install what they contain by hand."
    fi
    if [ "$(id -u)" -eq 0 ]; then
      step "install $missing" system.log install_packages env
    elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
      step "install $missing" system.log install_packages sudo
    elif [ "$missing" != ccache ]; then
      die "missing system packages. Run this, then the same command again:
    sudo apt-get update && sudo apt-get install -y --no-install-recommends $missing"
    fi
  fi
  local gcc
  gcc=$(g++ -dumpversion)
  [ "${gcc%%.*}" -ge 11 ] || die "g++ is version $gcc: C++20 needs 11 or newer"
}

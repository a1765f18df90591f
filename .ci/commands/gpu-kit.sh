#!/usr/bin/env bash
# Fill a folder with what a GPU machine without package registries lacks.
#
# usage: ./dev gpu-kit [FOLDER] [--python 3.N]
#
#   FOLDER            default: build/gpu-kit
#   --python 3.N      of that machine (default: 3.12)
#
# The machine has Python with its headers, torch, CMake, ninja and g++; the kit
# has the rest: UCX, Boost's headers (those that the sources include), GoogleTest,
# pytest and what else the tests and benchmarks import. ./dev test-gpu --kit FOLDER
# uses it there. Versions are those of pyproject.toml. It has at most 60 MB; what
# each part has is printed. A kit that is up to date is left as it is.

source "$ROOT/.ci/lib/setup.sh"

folder= python=3.12
while [ $# -gt 0 ]; do
  case $1 in
    --python) python=${2:?--python needs a version} && shift ;;
    -*) die "gpu-kit: unknown argument '$1' (./dev gpu-kit --help)" ;;
    *)
      [ -z "$folder" ] || die "gpu-kit: takes one folder, got '$folder' and '$1'"
      folder=$1
      ;;
  esac
  shift
done
[[ $python =~ ^3\.1[0-3]$ ]] || die "gpu-kit: --python is '$python'; expected 3.10 to 3.13"

lock
ensure_system
ensure_python
unlock
exec "$VPYTHON" "$ROOT/.ci/gpu_kit.py" make "${folder:-build/gpu-kit}" --python "$python" --ucx "$UCX_WHEEL"

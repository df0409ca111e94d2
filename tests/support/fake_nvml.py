"""Compiles a libnvidia-ml.so.1 that answers for GPUs which are not there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

_SOURCE = r"""
#include <cstdio>
#include <cstring>

#ifndef INIT_STATUS
#define INIT_STATUS 0
#endif
#ifndef LINK_STATUS
#define LINK_STATUS 0
#endif
#ifndef CUDA_STATUS
#define CUDA_STATUS 0
#endif
#ifndef GPU_COUNT
#define GPU_COUNT 2
#endif

namespace {
struct Memory { unsigned long long total, free, used; };
struct Pci { char legacy[16]; unsigned domain, bus, device, device_id, subsystem_id; char bus_id[32]; };
int gpus[] = {0, 1};
int answer(unsigned* out, unsigned value) { *out = value; return LINK_STATUS; }
}  // namespace

extern "C" {
int nvmlInit_v2() { return INIT_STATUS; }
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int status) { return status == 9 ? "Driver Not Loaded" : "Not Supported"; }
int nvmlSystemGetDriverVersion(char* text, unsigned length) {
    std::snprintf(text, length, "570.86.15");
    return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = 12080; return CUDA_STATUS; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = GPU_COUNT; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) { *device = &gpus[index]; return 0; }
int nvmlDeviceGetName(void* device, char* text, unsigned length) {
    std::snprintf(text, length, "Imaginary GPU %d", *static_cast<int*>(device));
    return 0;
}
int nvmlDeviceGetUUID(void* device, char* text, unsigned length) {
    std::snprintf(text, length, "GPU-%d0000000-aaaa", *static_cast<int*>(device));
    return 0;
}
int nvmlDeviceGetMemoryInfo(void*, Memory* memory) {
    *memory = {24ULL << 30, 23ULL << 30, 1ULL << 30};
    return 0;
}
int nvmlDeviceGetPciInfo_v3(void* device, Pci* pci) {
    std::snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", *static_cast<int*>(device) + 0x3B);
    return 0;
}
int nvmlDeviceGetCurrPcieLinkGeneration(void*, unsigned* out) { return answer(out, 1); }
int nvmlDeviceGetMaxPcieLinkGeneration(void*, unsigned* out) { return answer(out, 4); }
int nvmlDeviceGetCurrPcieLinkWidth(void*, unsigned* out) { return answer(out, 8); }
int nvmlDeviceGetMaxPcieLinkWidth(void*, unsigned* out) { return answer(out, 16); }
}
"""


def compiler() -> str | None:
    """Return a C++ compiler, None where there is none."""
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def compile_nvml(directory: Path, *definitions: str) -> Path:
    """Compile the library into `directory`, its behaviour changed by `definitions` such as
    "GPU_COUNT=0".
    """
    source, library = directory / "nvml.cpp", directory / "libnvidia-ml.so.1"
    source.write_text(_SOURCE)
    command = [
        compiler() or "c++",
        "-shared",
        "-fPIC",
        "-O0",
        *(f"-D{definition}" for definition in definitions),
    ]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    return library

"""Map CUDA memory in several processes, handed over as a file descriptor, by CUDA's virtual memory management.

    create   cuMemCreate  ──▶ cuMemExportToShareableHandle ──▶ descriptor ──▶ cuMemImportFromShareableHandle   open
             └──────────────── cuMemAddressReserve, cuMemMap, cuMemSetAccess ─────────────────┘

The memory has no name, and lasts until the last process has unmapped it, whichever process made it: a process that ends
takes nothing from the others. (CUDA's older handles, which `torch.multiprocessing` sends, promise neither.)

Source: CUDA driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_PINNED, _DEVICE, _FILE_DESCRIPTOR, _READ_AND_WRITE, _MINIMUM = 1, 1, 1, 3, 0


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Flags(ctypes.Structure):
    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4))


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", c_int), ("handle_types", c_int), ("location", _Location), ("win32", c_void_p), ("flags", _Flags),
    )  # fmt: skip


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", c_int))


@lru_cache(maxsize=1)
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    arguments = {
        "cuGetErrorName": (c_int, c_void_p),
        "cuMemGetAllocationGranularity": (c_void_p, c_void_p, c_int),
        "cuMemCreate": (c_void_p, c_size_t, c_void_p, c_uint64),
        "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
        "cuMemImportFromShareableHandle": (c_void_p, c_void_p, c_int),
        "cuMemAddressReserve": (c_void_p, c_size_t, c_size_t, c_uint64, c_uint64),
        "cuMemAddressFree": (c_uint64, c_size_t),
        "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
        "cuMemUnmap": (c_uint64, c_size_t),
        "cuMemSetAccess": (c_uint64, c_size_t, c_void_p, c_size_t),
        "cuMemRelease": (c_uint64,),
    }
    try:
        for name, types in arguments.items():
            getattr(driver, name).argtypes = types
    except AttributeError as error:
        raise OSError(errno.ENOSYS, f"this CUDA driver cannot share memory by descriptors: {error}") from None
    return driver


def _call(name: str, *arguments: Any) -> None:
    driver = _driver()
    code = getattr(driver, name)(*arguments)
    if code:
        text = c_char_p()
        driver.cuGetErrorName(code, byref(text))
        raise OSError(errno.EIO, f"{name}: {(text.value or b'CUDA error').decode()} ({code})")


class _CudaMapping:
    """It is CUDA memory at an address of this process."""

    def __init__(self, handle: int, device: torch.device, nbytes: int) -> None:
        """Map the memory of a handle, which this releases: mappings keep the memory."""
        self._address, self._nbytes = 0, nbytes
        self._tensor: Tensor | None = None
        try:
            address = c_uint64()
            _call("cuMemAddressReserve", byref(address), nbytes, 0, 0, 0)
            try:
                _call("cuMemMap", address, nbytes, 0, handle, 0)
            except BaseException:
                _call("cuMemAddressFree", address, nbytes)
                raise
            self._address = address.value
            access = _Access(_Location(_DEVICE, device.index), _READ_AND_WRITE)
            _call("cuMemSetAccess", address, nbytes, byref(access), 1)
            self._tensor = torch.as_tensor(_Bytes(address.value, nbytes), device=device)
        except BaseException:
            self.close()
            raise
        finally:
            _call("cuMemRelease", handle)

    @property
    def tensor(self) -> Tensor:
        """Return its bytes."""
        assert self._tensor is not None
        return self._tensor

    def close(self) -> None:
        """Unmap the memory."""
        address, self._address, self._tensor = self._address, 0, None
        if address:
            with contextlib.suppress(OSError):  # the process has lost its GPU, and with it the mapping
                _call("cuMemUnmap", address, self._nbytes)
                _call("cuMemAddressFree", address, self._nbytes)


class _Bytes:
    """PyTorch makes a tensor of it: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


class CudaMemory:
    """It is the `DeviceMemory` of NVIDIA's GPUs."""

    def create(self, device: torch.device, nbytes: int) -> tuple[int, _CudaMapping]:
        """Return new memory, rounded up to the driver's granularity, and its descriptor."""
        properties = _properties(device)
        handle = c_uint64()
        _call("cuMemCreate", byref(handle), _rounded(properties, nbytes), byref(properties), 0)
        fd = c_int(-1)
        try:
            _call("cuMemExportToShareableHandle", byref(fd), handle, _FILE_DESCRIPTOR, 0)
        except BaseException:
            _call("cuMemRelease", handle)
            raise
        return fd.value, _CudaMapping(handle.value, device, _rounded(properties, nbytes))

    def open(self, fd: int, device: torch.device, nbytes: int) -> _CudaMapping:
        """Map the memory that another process made."""
        handle = c_uint64()
        _call("cuMemImportFromShareableHandle", byref(handle), fd, _FILE_DESCRIPTOR)
        return _CudaMapping(handle.value, device, _rounded(_properties(device), nbytes))


def _properties(device: torch.device) -> _Properties:
    return _Properties(_PINNED, _FILE_DESCRIPTOR, _Location(_DEVICE, device.index), None, _Flags())


def _rounded(properties: _Properties, nbytes: int) -> int:
    granularity = c_size_t()
    _call("cuMemGetAllocationGranularity", byref(granularity), byref(properties), _MINIMUM)
    return -(-nbytes // granularity.value) * granularity.value

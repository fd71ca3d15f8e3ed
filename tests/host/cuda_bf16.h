// Stands in for CUDA's header when a decoder is compiled for the host: shim.h has what it declares.
#pragma once

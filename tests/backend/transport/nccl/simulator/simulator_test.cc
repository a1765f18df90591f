#include "tests/backend/transport/nccl/simulator/simulated_cluster.h"

#include <gtest/gtest.h>

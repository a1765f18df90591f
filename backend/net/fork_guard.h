#pragma once

#include <boost/system/error_code.hpp>
#include <mutex>

namespace farandole::net {

// Sockets that a forked child must not keep open: as long as one process has a
// connection's descriptor the other end does not see it close, so a data-loader
// worker that outlives its parent would hide the parent's death. Every child
// made by fork() closes them before it runs; exec closes them too.
//
// Creation and registration are one step under a lock that fork() takes: no
// child can be made in between. Any thread; close before static destructors run.
int openGuarded(int domain);      // a non-blocking TCP socket, or -1 and errno
int acceptGuarded(int listener);  // likewise, of the next connection

std::mutex& guardMutex();
void forgetGuarded(int descriptor);  // guardMutex() held, just before it is closed

// Closes an Asio socket or acceptor that was given a descriptor from above.
template <typename Socket>
void closeGuarded(Socket& socket) {
  if (!socket.is_open()) return;
  std::lock_guard lock(guardMutex());
  forgetGuarded(socket.native_handle());
  boost::system::error_code ignored;
  socket.close(ignored);
}

}  // namespace farandole::net

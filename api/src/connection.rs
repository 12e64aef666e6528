//! The connection of a client, and whether the client still waits for a response.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

const IMMEDIATELY: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The socket of a client.
#[derive(Debug)]
pub(crate) struct ClientStream(Arc<TcpStream>);

/// Attached to each request of a connection.
#[derive(Debug, Clone)]
pub(crate) struct ClientConnection(Weak<TcpStream>);

impl ClientStream {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self(Arc::new(stream))
    }

    pub(crate) fn connection(&self) -> ClientConnection {
        ClientConnection(Arc::downgrade(&self.0))
    }
}

impl ClientConnection {
    /// Returns whether the connection exists and the client has not closed it. Data that was not read yet does not matter.
    pub(crate) fn is_open(&self) -> bool {
        let Some(stream) = self.0.upgrade() else { return false };
        let mut sockets = [PollFd::new(&*stream, PollFlags::RDHUP)];
        // A failed query says nothing about the client.
        poll(&mut sockets, Some(&IMMEDIATELY)).is_err() || sockets[0].revents().is_empty()
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.poll_read_ready(cx))?;
            match self.0.try_read(buffer.initialize_unfilled()) {
                Ok(count) => {
                    buffer.advance(count);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl ClientStream {
    fn poll_try_write(
        &self,
        cx: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(cx))?;
            match write(&self.0) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                outcome => return Poll::Ready(outcome),
            }
        }
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_try_write(cx, |stream| stream.try_write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_try_write(cx, |stream| stream.try_write_vectored(parts))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(rustix::net::shutdown(&*self.0, rustix::net::Shutdown::Write).map_err(Into::into))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn notices_that_client_is_gone_before_its_data_is_read() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let mut stream = ClientStream::new(listener.accept().await.unwrap().0);
        let connection = stream.connection();
        assert!(connection.is_open());
        client.write_all(b"request").await.unwrap();
        stream.write_all(b"response").await.unwrap();
        let mut buffer = [0; 8];
        client.read_exact(&mut buffer).await.unwrap();
        assert!(connection.is_open());
        drop(client);
        while connection.is_open() {
            tokio::task::yield_now().await;
        }
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        assert_eq!((text.as_str(), &buffer), ("request", b"response"));
        drop(stream);
        assert!(!connection.is_open());
    }
}

//! Connections that end when their client may not use them any longer. See docs/decisions/0080.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use muster_control::state::ConsoleSession;

/// A connection of a console. Reading fails when the key or the browser session of the client has ended.
pub(crate) struct AuthorizedStream<S> {
    stream: S,
    ended: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl<S> AuthorizedStream<S> {
    pub(crate) fn new(stream: S, session: ConsoleSession) -> Self {
        Self { stream, ended: Box::pin(session.ended()) }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for AuthorizedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.ended.as_mut().poll(cx).is_ready() {
            // A future must not be polled after it is ready.
            self.ended = Box::pin(std::future::ready(()));
            let reason = "the key or the session of the client has ended";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::PermissionDenied, reason)));
        }
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AuthorizedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buffer)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
